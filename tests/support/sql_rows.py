"""A table with awkward names and values."""

TEAMS = {
    "name": "2nd league",
    "columns": ["1st name", "Points", "founded"],
    "rows": [
        ("Zoë", "9", "2001-05-30"),
        ("ADA", "10", "1999-12-31"),
        ("O'Neil", "9.5", "n/a"),
        ("50% off", "1,200", ""),
    ],
}
