"""Round the weights of an exported graph by calibration; `pt2mx.algorithms` has the algorithms themselves."""
