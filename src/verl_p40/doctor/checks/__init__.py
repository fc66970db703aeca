"""One module a group; whatever lies in here is found."""
