"""Which task of which environment comes next."""
