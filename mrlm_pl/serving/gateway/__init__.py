"""Programs that call their models over OpenAI's protocol: the endpoint, the episodes behind it, and the programs."""
