"""Messages to text to token ids, and back."""
