"""How far the attention kernels may be from float64, for values of unit variance."""

from tests.support.attention_truth import BF16, E4M3

# Float32 sums of probabilities, and their logarithm.
LSE_ERROR = 2e-5
# Decode, beyond the output's own rounding, by the cache's dtype: probabilities are split in two
# bf16, or are f16.
SUM_ERROR = {BF16: 5e-5, E4M3: 2e-3}
# Prefill: rounding of probabilities before their product with the values, a little more than half
# an ulp: bf16, e4m3.
WEIGHT_ERROR = {BF16: 1 / 250, E4M3: 1 / 15.5}
# Prefill: the tensor cores cut each term of a sum of e4m3 products off 13 bits behind the largest
# of a step of 32. An emulation of that is off by up to 1.7 times 2^-13 of the sum of a score's
# magnitudes, and gives the very log-sum-exp that the H200 gave where that was 4e-3 off.
SCORE_ERROR = 2.0**-12
