"""Triton kernels that only stacked networks need: inputs, convolutions, dropout, the loss, the optimiser step."""
