"""What watching costs a training loop: sentinel beside other trackers, in one run (`make bench-overhead`)."""
