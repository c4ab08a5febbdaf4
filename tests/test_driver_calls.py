"""What the counts of driver calls say, without a GPU."""

from tests.support.driver_calls import DriverCalls


def test_polls_are_not_counted() -> None:
    """Two runs on an H200: while one waited, the runtime polled its stream 19 times."""
    polled, quiet = DriverCalls(), DriverCalls()
    polled.update(cuGraphLaunch=4, cuCtxSetCurrent=23, cuStreamIsCapturing=20, cuStreamQuery=19)
    quiet.update(cuGraphLaunch=4, cuCtxSetCurrent=4, cuStreamIsCapturing=1)
    assert polled.without_polls() == quiet.without_polls() == dict(quiet)
    assert (polled.polls, quiet.polls) == (19, 0)


def test_a_copy_in_each_step_is_counted() -> None:
    calls = DriverCalls()
    calls.update(cuGraphLaunch=4, cuMemcpyDtoDAsync=4, cuStreamQuery=2, cuCtxSetCurrent=2)
    assert calls.without_polls() == {"cuGraphLaunch": 4, "cuMemcpyDtoDAsync": 4}
