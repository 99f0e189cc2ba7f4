/* Plays QEMU to the plugin vringlab-count: vCPUs that are threads, blocks that are translated when they
 * are first run and then run again, and scoreboards.
 *
 *     plugin_harness TARGET VCPUS MAX-VCPUS [ARGUMENT]      installs it, then reads lines:
 *     start VCPU
 *     run VCPU SIDE ADDRESS INSTRUCTIONS TIMES [vmrun]      SIDE: host or guest, which QEMU knows
 * and says `done` after each. The last instruction of a block is VMRUN if that is said; memory of host
 * and guest is never at one place.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "qemu-plugin-api.h"

#define VCPUS 4
#define BLOCKS 64

struct qemu_plugin_insn {
	uint64_t address;
	char *memory;
	unsigned char code[3];
	qemu_plugin_vcpu_udata_cb_t executed;
};

struct qemu_plugin_tb {
	uint64_t address;
	char side[8];
	size_t size;
	struct qemu_plugin_insn first, last, other;
	size_t offset;
	uint64_t operand;
};

struct qemu_plugin_scoreboard {
	size_t size;
	char *data;
};

static struct qemu_plugin_scoreboard board;
static struct qemu_plugin_tb blocks[BLOCKS];
static qemu_plugin_vcpu_simple_cb_t started;
static qemu_plugin_vcpu_tb_trans_cb_t translate;
static char memory[2][1 << 16];

int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t *info, int argc, char **argv);

void qemu_plugin_register_vcpu_init_cb(qemu_plugin_id_t id, qemu_plugin_vcpu_simple_cb_t cb)
{
	(void)id;
	started = cb;
}

void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t id, qemu_plugin_vcpu_tb_trans_cb_t cb)
{
	(void)id;
	translate = cb;
}

void qemu_plugin_register_vcpu_tb_exec_inline_per_vcpu(struct qemu_plugin_tb *tb,
						       enum qemu_plugin_op op,
						       qemu_plugin_u64 entry, uint64_t operand)
{
	(void)op;
	if (entry.score != &board || entry.offset + sizeof(uint64_t) > board.size)
		abort();
	tb->offset = entry.offset;
	tb->operand = operand;
}

void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *insn,
					    qemu_plugin_vcpu_udata_cb_t cb,
					    enum qemu_plugin_cb_flags flags, void *data)
{
	(void)flags;
	(void)data;
	insn->executed = cb;
}

size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb)
{
	return tb->size;
}

uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb *tb)
{
	return tb->address;
}

struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *tb, size_t index)
{
	struct qemu_plugin_tb *whole = (struct qemu_plugin_tb *)tb;

	return index == tb->size - 1 ? &whole->last : index == 0 ? &whole->first : &whole->other;
}

size_t qemu_plugin_insn_data(const struct qemu_plugin_insn *insn, void *to, size_t size)
{
	memcpy(to, insn->code, size < 3 ? size : 3);
	return size < 3 ? size : 3;
}

size_t qemu_plugin_insn_size(const struct qemu_plugin_insn *insn)
{
	(void)insn;
	return 3;
}

uint64_t qemu_plugin_insn_vaddr(const struct qemu_plugin_insn *insn)
{
	return insn->address;
}

void *qemu_plugin_insn_haddr(const struct qemu_plugin_insn *insn)
{
	return insn->memory;
}

struct qemu_plugin_scoreboard *qemu_plugin_scoreboard_new(size_t element_size)
{
	board.size = element_size;
	board.data = calloc(VCPUS, element_size);
	return &board;
}

void *qemu_plugin_scoreboard_find(struct qemu_plugin_scoreboard *score, unsigned int vcpu)
{
	return score->data + vcpu * score->size;
}

static struct qemu_plugin_tb *block_of(const char *side, uint64_t address, size_t size, bool vmrun)
{
	char *place = memory[strcmp(side, "guest") == 0];
	struct qemu_plugin_tb *tb = blocks;

	while (tb->size && (tb->address != address || strcmp(tb->side, side) != 0))
		if (++tb == blocks + BLOCKS)
			abort();
	if (tb->size == 0) {
		strcpy(tb->side, side);
		tb->address = address;
		tb->size = size;
		tb->first.address = address;
		tb->first.memory = place + address % sizeof memory[0];
		tb->last.address = address + 3 * (size - 1);
		tb->last.memory = place + tb->last.address % sizeof memory[0];
		if (vmrun)
			memcpy(tb->last.code, "\x0f\x01\xd8", 3);
		translate(1, tb);
	}
	return tb;
}

static void run(unsigned int vcpu, const char *side, uint64_t address, size_t size,
		unsigned int times, bool vmrun)
{
	struct qemu_plugin_tb *tb = block_of(side, address, size, vmrun);

	while (times--) {
		*(uint64_t *)(board.data + vcpu * board.size + tb->offset) += tb->operand;
		if (tb->first.executed)
			tb->first.executed(vcpu, NULL);
		if (tb->last.executed)
			tb->last.executed(vcpu, NULL);
	}
}

/* Each vCPU is a thread that obeys one line at a time. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static char line[256];
static unsigned int turn = VCPUS;

static void *obey(void *data)
{
	unsigned int vcpu = (unsigned int)(uintptr_t)data;

	pthread_mutex_lock(&lock);
	for (;;) {
		char side[8], word[8] = "";
		unsigned long long address, size;
		unsigned int times;

		while (turn != vcpu)
			pthread_cond_wait(&changed, &lock);
		if (sscanf(line, "run %*u %7s %llx %llu %u %7s", side, &address, &size, &times, word) >= 4)
			run(vcpu, side, address, size, times, *word);
		else
			started(1, vcpu);
		turn = VCPUS;
		pthread_cond_broadcast(&changed);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	qemu_info_t info = {
		.target_name = argv[1],
		.system_emulation = true,
		.system = { atoi(argv[2]), atoi(argv[3]) },
	};
	pthread_t thread;

	if (qemu_plugin_install(1, &info, argc - 4, argv + 4) != 0)
		return 3;
	for (uintptr_t vcpu = 0; vcpu < VCPUS; vcpu++)
		pthread_create(&thread, NULL, obey, (void *)vcpu);
	setbuf(stdout, NULL);
	pthread_mutex_lock(&lock);
	while (fgets(line, sizeof line, stdin)) {
		turn = (unsigned int)atoi(strchr(line, ' '));
		pthread_cond_broadcast(&changed);
		while (turn != VCPUS)
			pthread_cond_wait(&changed, &lock);
		puts("done");
	}
	return 0;
}
