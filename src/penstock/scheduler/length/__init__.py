"""Length prediction: predictors of answer length, and a measure of how well they rank tasks."""
