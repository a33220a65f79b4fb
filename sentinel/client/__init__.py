"""Inside the training process: watches the loop, obeys at step boundaries, never gets in the way."""
