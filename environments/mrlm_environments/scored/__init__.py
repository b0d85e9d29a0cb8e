"""An environment whose rewards are a reward model's scores."""
