#include "toy.h"

/* Twice the value: what the arms of the tests disagree about. */
int toy_scale(int value)
{
	return value * 2;
}

int toy_init(void)
{
	int answer = toy_scale(21);

	return answer;
}
