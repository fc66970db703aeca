"""Facts of the graphics cards: what is sampled from them, and the limits of a Tesla P40."""
