"""The frozen suite: what users have stays as it was when the suite was made, whatever is rewritten inside."""
