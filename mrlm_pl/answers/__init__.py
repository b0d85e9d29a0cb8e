"""Right and wrong answers as data: reading numbers, records, balancing, wrong answers."""
