"""What every room may use: options, events of a split, forks, logs, text."""
