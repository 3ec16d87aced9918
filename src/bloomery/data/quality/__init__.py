"""Quality and toxicity classifiers: their examples, training, calibration and thresholds."""
