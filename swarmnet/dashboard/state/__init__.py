"""What the dashboard shows, as JSON: pure functions of what was observed."""
