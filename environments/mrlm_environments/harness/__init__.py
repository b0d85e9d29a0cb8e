"""Programs of users, played as environments."""
