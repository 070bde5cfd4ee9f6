"""Steps of training that ran, as traces recorded them, and the parts of their seconds."""
