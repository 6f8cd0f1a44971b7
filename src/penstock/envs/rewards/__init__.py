"""What an answer is worth, where the environment itself does not say."""
