"""Launch of a user's script on several ranks (`wanma launch`): launcher, rank entry point, record."""
