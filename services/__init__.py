"""The processes of a Splitwise cluster: one folder each, all thin shells over ``splitwise``."""
