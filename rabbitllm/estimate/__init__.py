"""What a split would take, told before it: the survey, the forecast's public function, and its report as text."""
