"""The service itself: its turns, its start and end, what others may ask of it and how it comes back."""
