"""The trainer's settings by subject: `train.settings` has them as nested groups."""
