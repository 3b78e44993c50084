"""Code that the studies of a fine-tuning's quality share."""
