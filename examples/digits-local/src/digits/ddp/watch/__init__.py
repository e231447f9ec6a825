"""From a sign of trouble to the exit: who is slow, silent or gone, who is to blame, and the way out."""
