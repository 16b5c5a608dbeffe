"""The split directory: the only thing that the splitter and the engine both know."""
