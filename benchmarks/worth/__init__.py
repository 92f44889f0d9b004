"""What the plan is worth: ours against other launchers and a sweep of all settings, on machines of several moods."""
