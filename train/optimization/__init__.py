"""The optimizer, its learning rate and the EMA."""
