"""What training and report share: the files of a run, errors and output."""
