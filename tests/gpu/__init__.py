"""What only a machine with CUDA can show."""
