"""Right and wrong answers as data: numbers, records, balancing, wrong answers."""
