"""The training run: build, train, evaluate, save."""
