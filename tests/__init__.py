"""Tests mirror the packages; end_to_end/ runs real processes, benchmarks/ prints ratios, gpu/ needs CUDA."""
