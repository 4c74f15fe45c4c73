package bench

// statistic is the figure of a row that its budget is about.
type statistic func(Result) float64

func p99(r Result) float64     { return r.P99 }
func highest(r Result) float64 { return r.Max }

// limit is a row of the performance budget.
type limit struct {
	name   string
	what   string
	unit   string
	most   float64
	figure statistic
}

// budget has the rows in the order in which they are printed. One vCPU, a stock
// Debian 6.12 guest, 2 GiB of RAM, all devices present.
var budget = []limit{
	{"create_ready", "create, ready process waiting, until the guest agent answers", CMS, 6, p99},
	{"create_rehearsed", "create, process waiting that has rehearsed the snapshot, until the guest agent answers", CMS, 6, p99},
	{"create_cold", "create from nothing, until the guest agent answers", CMS, 20, p99},
	{"create_first_command", "create from nothing, until the first command has ended", CMS, 25, p99},
	{"fork_pause", "fork: pause of the source, 1,000 pages dirtied", CMS, 3, highest},
	{"fork16_child", "fork 16, ready processes waiting: for each child, until its guest agent answers", CMS, 8, highest},
	{"reset", "reset in place until the guest agent answers, 1,000 pages dirtied", CMS, 3, p99},
	{"step_pause", "step snapshot: pause, 1,000 pages dirtied", CMS, 3, highest},
	{"ram_scaling", "any of these: 8 GiB of guest RAM against 512 MiB", Ratio, 1.1, highest},
	{"burst100_ratio", "100 creates at once against 100 single ones", Ratio, 1.1, highest},
	{"exec_true", "a command (true) in a guest in use, until its result is there", CMS, 12, p99},
	{"ping", "a question to the guest agent over a connection that is kept, until its answer is there", CMS, 0.6, p99},
	{"reward_both", "judging in both ways, ready processes waiting, beyond what the verifier takes", CMS, 60, highest},
	{"reward_rehearsed", "the same, processes waiting that have rehearsed the task's snapshot", CMS, 60, highest},
	{"create_card", "create from nothing with a network card, until the guest agent answers", CMS, 20, p99},
	{"create_card_ready", "create with a network card, ready process waiting", CMS, 6, p99},
	{"create_card_rehearsed", "create with a network card, process waiting that has rehearsed the snapshot", CMS, 6, p99},
	{"create_tap_ready", "create with a network card and a TAP device, ready process waiting with both", CMS, 6, p99},
	{"create_tap_rehearsed", "create with a network card and a TAP device, process waiting that has rehearsed the snapshot", CMS, 6, p99},
	{"set_network", "change of a network policy, until it is in force", CMS, 1, p99},
	{"clone_private", "private memory of an idle clone, its process included", MiB, 6, highest},
}

// judge compares a row with the budget, if it is a row of it.
func judge(r Result) Result {
	for _, l := range budget {
		if l.name == r.Name {
			most := l.most
			r.Budget = &most
			r.OK = r.N > 0 && l.figure(r) <= most
		}
	}
	return r
}
