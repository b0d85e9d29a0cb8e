"""A shop to search and to buy in, as in WebShop."""
