"""Parts of the scheduling benchmark."""
