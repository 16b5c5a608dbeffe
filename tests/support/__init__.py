"""What the tests are built on: a local hub and tiny checkpoints."""
