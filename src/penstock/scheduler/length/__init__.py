"""Predicts how long answers will be, and measures whether the predictions are worth anything."""
