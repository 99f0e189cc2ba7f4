/* SPDX-License-Identifier: GPL-2.0-only
 *
 * vringlab-count: a QEMU TCG plugin that counts the instructions of an emulated KVM host and of the
 * guest on it, by vCPU of the host, side, and address.
 *
 *     -plugin vringlab-count.so,fd=N         N: one end of a stream socket that QEMU inherits
 *
 * What is counted. At its begin every translated block adds the number of its instructions to a
 * counter in its vCPU's entry of a scoreboard, in line, without a call. A block of the kernel has
 * a counter of its own, by (side, address of its first instruction): which module and function that
 * is, is asked when the counters are read, by whoever knows what was loaded. All blocks at
 * addresses without the top bit (user space; also firmware, and a kernel before it has page tables)
 * share one counter for each side. A block that an exception ends early was counted whole, and a
 * repeated string instruction counts as often as QEMU starts it.
 *
 * Sides. The host runs its guest by emulated SVM, so that both are blocks of the same vCPU, and both
 * kernels have the same addresses. But a vCPU is in its guest from VMRUN until the instruction after
 * it, where it goes on at an exit; and QEMU never shares a block between the two, since whether SVM
 * intercepts is among the flags that a block is looked up by. So it is enough to know at translation
 * which side the vCPU is on. A vCPU is a thread (`-accel tcg,thread=multi`), so that is a variable
 * of the thread, which callbacks on these two instructions set.
 *
 * Reading. A thread of ours answers every byte 'r' on the socket with the counters: 64-bit numbers,
 * little endian: magic, version, vCPUs that run, vCPUs expected, blocks listed (n), blocks that found
 * no room; for each of SHARED and each running vCPU in turn a counter; n addresses; for each running
 * vCPU in turn n counters. The address of a guest's block has its top bit cleared. Blocks keep
 * their order and are never taken out, so that a later reading begins with the blocks of an earlier
 * one. Counters go on while they are read: each is exact, all together are not of one instant.
 *
 * A socket rather than shared memory, because scoreboards are QEMU's own memory; an inherited
 * one rather than a path, because nobody else can connect and no path is too long.
 *
 * Built on one machine and run with the C library of the image, so it calls little of it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "qemu-plugin-api.h"

#define MAGIC 0x544e554f434c5256u   /* "VRLCOUNT" */
#define FORMAT 1u

#define TOP_BIT ((uint64_t)1 << 63)
/* The kernels of an embedded host and its guest have some 200 thousand blocks together. */
#ifndef SLOTS
#define SLOTS (1u << 19)
#endif
#define BUCKETS (2 * SLOTS)

enum side { HOST, GUEST, SIDES };

/* Counters of many blocks each; the others follow, one for each block. */
enum { USER = 0, KERNEL_REST = SIDES, SHARED = 2 * SIDES };

PLUGIN_EXPORT int qemu_plugin_version = PLUGIN_API_VERSION;

static struct qemu_plugin_scoreboard *board;   /* SLOTS numbers a vCPU */
static unsigned int vcpus_expected, vcpus_running;
static int connection;

static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t address_of[SLOTS];             /* by slot, as they are sent */
static uint32_t buckets[BUCKETS];              /* slot, or 0: none */
static unsigned int slots_used = SHARED;
static uint64_t blocks_lost;

/* Where the host's VMRUN is, both as the kernel and as QEMU see it. */
static uint64_t vmrun_address;
static const char *vmrun_memory;

static __thread enum side side;

/* ---- Translation --------------------------------------------------------------------------- */

static unsigned int slot_of(uint64_t address)
{
	uint64_t key = side == GUEST ? address & ~TOP_BIT : address;
	unsigned int slot, at = (unsigned int)(key * 0x9e3779b97f4a7c15u >> 40) % BUCKETS;

	pthread_mutex_lock(&table_lock);
	while ((slot = buckets[at]) != 0 && address_of[slot] != key)
		at = (at + 1) % BUCKETS;
	if (slot == 0 && slots_used < SLOTS) {
		slot = slots_used;
		address_of[slot] = key;
		buckets[at] = slot;
		__atomic_store_n(&slots_used, slot + 1, __ATOMIC_RELEASE);
	} else if (slot == 0) {
		slot = KERNEL_REST + side;
		__atomic_add_fetch(&blocks_lost, 1, __ATOMIC_RELAXED);
	}
	pthread_mutex_unlock(&table_lock);
	return slot;
}

static void enter_guest(unsigned int vcpu, void *data)
{
	(void)vcpu;
	(void)data;
	side = GUEST;
}

static void leave_guest(unsigned int vcpu, void *data)
{
	(void)vcpu;
	(void)data;
	side = HOST;
}

static bool is_vmrun(const struct qemu_plugin_insn *insn)
{
	unsigned char code[3];

	return qemu_plugin_insn_size(insn) == sizeof code
	       && qemu_plugin_insn_data(insn, code, sizeof code) == sizeof code
	       && memcmp(code, "\x0f\x01\xd8", sizeof code) == 0;
}

/* A guest may have code at the very address, but not in the same place of QEMU's memory. */
static bool follows_vmrun(uint64_t address, const struct qemu_plugin_insn *insn)
{
	uint64_t vmrun = __atomic_load_n(&vmrun_address, __ATOMIC_ACQUIRE);

	return vmrun && address == vmrun + 3
	       && (const char *)qemu_plugin_insn_haddr(insn) == vmrun_memory + 3;
}

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *tb)
{
	uint64_t address = qemu_plugin_tb_vaddr(tb);
	size_t size = qemu_plugin_tb_n_insns(tb);
	unsigned int slot = USER;

	(void)id;
	if (size == 0)
		return;
	if (address & TOP_BIT) {
		struct qemu_plugin_insn *first = qemu_plugin_tb_get_insn(tb, 0);
		struct qemu_plugin_insn *last = qemu_plugin_tb_get_insn(tb, size - 1);

		/* At the first exit this is translated before it runs. */
		if (follows_vmrun(address, first)) {
			side = HOST;
			qemu_plugin_register_vcpu_insn_exec_cb(first, leave_guest,
							       QEMU_PLUGIN_CB_NO_REGS, NULL);
		}
		/* A guest's own VMRUN would be an exit. The host's ends its block. */
		if (side == HOST && is_vmrun(last)) {
			vmrun_memory = qemu_plugin_insn_haddr(last);
			__atomic_store_n(&vmrun_address, qemu_plugin_insn_vaddr(last),
					 __ATOMIC_RELEASE);
			qemu_plugin_register_vcpu_insn_exec_cb(last, enter_guest,
							       QEMU_PLUGIN_CB_NO_REGS, NULL);
		}
		slot = slot_of(address);
	} else {
		slot = USER + side;
	}
	qemu_plugin_u64 counter = { board, slot * sizeof(uint64_t) };
	qemu_plugin_register_vcpu_tb_exec_inline_per_vcpu(tb, QEMU_PLUGIN_INLINE_ADD_U64, counter,
							  size);
}

static void vcpu_runs(qemu_plugin_id_t id, unsigned int vcpu)
{
	(void)id;
	(void)vcpu;
	__atomic_add_fetch(&vcpus_running, 1, __ATOMIC_RELEASE);
}

/* ---- Reading ------------------------------------------------------------------------------- */

static bool send_all(const void *data, size_t size)
{
	const char *at = data;

	while (size) {
		ssize_t done = send(connection, at, size, MSG_NOSIGNAL);

		if (done < 0 && errno == EINTR)
			continue;
		if (done <= 0)
			return false;
		at += done;
		size -= (size_t)done;
	}
	return true;
}

static bool send_counters(unsigned int vcpu, unsigned int from, unsigned int to, uint64_t *copy)
{
	const uint64_t *counters = qemu_plugin_scoreboard_find(board, vcpu);

	for (unsigned int slot = from; slot < to; slot++)
		copy[slot] = __atomic_load_n(&counters[slot], __ATOMIC_RELAXED);
	return send_all(copy + from, (to - from) * sizeof *copy);
}

static bool send_reading(void)
{
	static uint64_t copy[SLOTS];
	unsigned int vcpus = __atomic_load_n(&vcpus_running, __ATOMIC_ACQUIRE);
	unsigned int used = __atomic_load_n(&slots_used, __ATOMIC_ACQUIRE);

	/* Scoreboards move when a vCPU is added: none is looked at before all are there. */
	if (vcpus != vcpus_expected)
		used = SHARED;
	uint64_t head[] = {
		MAGIC, FORMAT, vcpus, vcpus_expected, used - SHARED,
		__atomic_load_n(&blocks_lost, __ATOMIC_RELAXED),
	};
	if (!send_all(head, sizeof head))
		return false;
	if (vcpus != vcpus_expected)
		return true;
	for (unsigned int slot = 0; slot < SHARED; slot++)
		for (unsigned int vcpu = 0; vcpu < vcpus; vcpu++)
			if (!send_counters(vcpu, slot, slot + 1, copy))
				return false;
	if (!send_all(address_of + SHARED, (used - SHARED) * sizeof *address_of))
		return false;
	for (unsigned int vcpu = 0; vcpu < vcpus; vcpu++)
		if (!send_counters(vcpu, SHARED, used, copy))
			return false;
	return true;
}

static void *serve(void *data)
{
	char request;

	for (;;) {
		ssize_t got = read(connection, &request, 1);

		if (got < 0 && errno == EINTR)
			continue;
		if (got != 1 || request != 'r' || !send_reading())
			break;
	}
	close(connection);
	return data;
}

/* ---- Installation -------------------------------------------------------------------------- */

static int refuse(const char *why)
{
	fprintf(stderr, "vringlab-count: %s\n", why);
	return 1;
}

static int descriptor(const char *word)
{
	int number = 0;

	if (strncmp(word, "fd=", 3) != 0 || word[3] == '\0')
		return -1;
	for (word += 3; *word; word++) {
		if (*word < '0' || *word > '9' || number > 100000)
			return -1;
		number = 10 * number + (*word - '0');
	}
	return number;
}

PLUGIN_EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t *info, int argc,
				      char **argv);

PLUGIN_EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t *info, int argc,
				      char **argv)
{
	pthread_t thread;
	sigset_t all, before;

	if (!info->system_emulation || strcmp(info->target_name, "x86_64") != 0)
		return refuse("it counts emulated x86_64 machines only");
	if (info->system.max_vcpus != info->system.smp_vcpus)
		return refuse("it cannot count vCPUs that are added later");
	connection = argc == 1 ? descriptor(argv[0]) : -1;
	if (connection < 0 || fcntl(connection, F_SETFD, FD_CLOEXEC) < 0)
		return refuse("it needs fd=NUMBER of an open socket");
	vcpus_expected = (unsigned int)info->system.smp_vcpus;
	board = qemu_plugin_scoreboard_new(SLOTS * sizeof(uint64_t));

	/* Signals are for QEMU's own threads. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	int failed = pthread_create(&thread, NULL, serve, NULL);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (failed)
		return refuse("it could not start its thread");
	pthread_detach(thread);
	qemu_plugin_register_vcpu_init_cb(id, vcpu_runs);
	qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
	return 0;
}
