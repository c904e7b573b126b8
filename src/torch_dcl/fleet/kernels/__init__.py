"""Triton kernels that only stacked networks need: inputs, convolutions, the optimiser step."""
