"""Tasks that have right and wrong answers, small enough for the demo model."""
