"""Memory that tasks of one host share: sealed regions, bodies that are lent, and how they meet."""
