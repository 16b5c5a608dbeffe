"""What a profile is made of and how it is shown: totals, passes, text, JSON, a trace, a picture."""
