"""What moves on stderr while something runs: one region in the process, in the form that suits where stderr goes."""
