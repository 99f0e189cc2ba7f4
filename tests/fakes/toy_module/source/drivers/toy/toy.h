int toy_scale(int value);
