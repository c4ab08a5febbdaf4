"""Whole models built from jax_hpc.nn, one file each; installed as jax_hpc.models."""
