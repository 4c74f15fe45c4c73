package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/internal/node"
	"github.com/forkvm/forkvm/vmm"
	"github.com/forkvm/forkvm/vmm/memory"
)

// What a VM has when the command line does not say.
const (
	defaultCPUs   = 1
	defaultMemory = 512 << 20
	maxClones     = 100
)

// choice is a flag with a few possible values.
type choice[T ~string] struct {
	value *T
	from  []T
}

func (c choice[T]) String() string {
	if c.value == nil {
		return ""
	}
	return string(*c.value)
}

func (c choice[T]) Set(s string) error {
	if !slices.Contains(c.from, T(s)) {
		return fmt.Errorf("%q is none of %s", s, c.Type())
	}
	*c.value = T(s)
	return nil
}

func (c choice[T]) Type() string {
	words := make([]string, len(c.from))
	for i, w := range c.from {
		words[i] = string(w)
	}
	return strings.Join(words, "|")
}

// headroom is what a VM may need of its control group's memory: a size, 0 for not to
// look, nothing for what machine.Demand says.
type headroom int64

func (h *headroom) Set(s string) error {
	n, err := output.ParseSize(s)
	if err != nil {
		return err
	}
	if *h = headroom(n); n == 0 {
		*h = machine.Unlimited
	}
	return nil
}

func (h *headroom) String() string { return "" } // it has no default that is a size
func (h *headroom) Type() string   { return "size" }

// cloneFlags are for whatever makes a VM.
type cloneFlags struct {
	networkFlags
	time         machine.Time
	readyTimeout time.Duration
	headroom     headroom
	recording    node.Recording
}

func (c *cloneFlags) add(f *pflag.FlagSet) {
	c.time = machine.TimeHost
	f.Var(choice[machine.Time]{&c.time, []machine.Time{machine.TimeHost, machine.TimeFrozen}}, "time", "what the guest's clock shows: the host's time, or time that goes on from the snapshot")
	f.DurationVar(&c.readyTimeout, "ready-timeout", node.DefaultReadyTimeout, "how long to wait for the guest agent, and then for --ready where there is one")
	f.Var(&c.headroom, "headroom", "memory that the control group's limit must leave for each VM; 0: do not look")
	f.Var(choice[node.Recording]{&c.recording, []node.Recording{node.RecordNone, node.RecordJournal, node.RecordSteps}}, "record",
		"what is kept of what is done to the VM: nothing, a journal (the default), or a snapshot of each step, too; a fork has what its parent has")
	c.networkFlags.add(f)
}

func (c *cloneFlags) options(name string) (node.Options, error) {
	network, err := c.networkFlags.policy()
	if err != nil {
		return node.Options{}, err
	}
	ports, err := c.networkFlags.published()
	return node.Options{
		Name: name, Time: c.time, ReadyTimeout: c.readyTimeout, Headroom: int64(c.headroom), Recording: c.recording,
		Network: network, Ports: ports, Enforce: c.networkFlags.by, Backend: c.networkFlags.backend,
	}, err
}

// bootFlags are for a boot from an image.
type bootFlags struct {
	cloneFlags
	name    string
	cpus    int
	memory  output.Bytes
	cmdline string
	mtu     int
	ready   readyFlags
}

func (b *bootFlags) add(f *pflag.FlagSet) {
	b.cloneFlags.add(f)
	b.memory = defaultMemory
	f.StringVar(&b.name, "name", "", "name of the VM, which is its hostname, too")
	f.IntVar(&b.cpus, "cpus", defaultCPUs, fmt.Sprintf("number of vCPUs, 1 to %d", vmm.MaxCPUs))
	f.VarP(&b.memory, "memory", "m", "RAM of the guest, such as 512M or 6G")
	f.StringVar(&b.cmdline, "kernel-args", "", "added to the kernel's command line")
	f.IntVar(&b.mtu, "mtu", machine.DefaultMTU, fmt.Sprintf("size of the largest packet of the network card, %d to %d", machine.MinMTU, machine.MaxMTU))
	b.ready.addConditions(f)
}

// checkMTU refuses a size of packets that no network card has.
func checkMTU(mtu int) error {
	if mtu < machine.MinMTU || mtu > machine.MaxMTU {
		return usagef("--mtu %d: %d to %d are possible", mtu, machine.MinMTU, machine.MaxMTU)
	}
	return nil
}

func (b *bootFlags) options() (node.Options, error) {
	if b.cpus < 1 || b.cpus > vmm.MaxCPUs {
		return node.Options{}, usagef("--cpus %d: 1 to %d are possible", b.cpus, vmm.MaxCPUs)
	}
	if _, err := memory.Layout(uint64(b.memory)); err != nil {
		return node.Options{}, usagef("--memory: %w", err)
	}
	if err := checkMTU(b.mtu); err != nil {
		return node.Options{}, err
	}
	o, err := b.cloneFlags.options(b.name)
	o.CPUs, o.MemoryBytes, o.CommandLine, o.NetworkMTU = b.cpus, uint64(b.memory), b.cmdline, b.mtu
	return o, err
}

func (a *app) createVerb() *cobra.Command {
	var flags bootFlags
	var from string
	cmd := &cobra.Command{
		Use:   "create [flags] IMAGE | create [flags] --snapshot NAME",
		Short: "Start a VM and leave it running",
		Example: "  forkvm create --cpus 2 --memory 2G debian\n" +
			"  forkvm create --snapshot task-1",
		Args: func(_ *cobra.Command, args []string) error {
			if (len(args) == 1) == (from != "") || len(args) > 1 {
				return usagef("an IMAGE is needed, or --snapshot NAME")
			}
			return nil
		},
	}
	flags.add(cmd.Flags())
	cmd.Flags().StringVar(&from, "snapshot", "", "start from this snapshot")
	cmd.RunE = a.onNode(func(ctx context.Context, n Node, args []string) error {
		if from == "" {
			o, err := flags.options()
			if err != nil {
				return err
			}
			return a.created(flags.start(ctx, func() (VM, error) { return n.Boot(ctx, args[0], o) }))
		}
		for _, name := range []string{"cpus", "memory", "kernel-args", "mtu"} {
			if cmd.Flags().Changed(name) {
				return usagef("--%s: a VM from a snapshot has what the snapshot had", name)
			}
		}
		options, err := flags.cloneFlags.options(flags.name)
		if err != nil {
			return err
		}
		return a.created(flags.start(ctx, func() (VM, error) { return n.Restore(ctx, from, options) }))
	})
	a.withQuiet(cmd, "print the id only (it is all that is printed anyway)")
	return a.withOutput(cmd)
}

// created shows what became of making a VM.
func (a *app) created(vm VM, err error) error {
	if err != nil {
		return err
	}
	return a.showCreated(vm)
}

// start makes a VM and waits for what --ready says. One that does not get there in
// time does not stay.
func (b *bootFlags) start(ctx context.Context, make func() (VM, error)) (VM, error) {
	conditions, err := b.ready.parse()
	if err != nil {
		return nil, err
	}
	vm, err := make()
	if err != nil {
		return nil, err
	}
	b.ready.timeout = b.readyTimeout
	if err := b.ready.wait(ctx, vm, conditions); err != nil {
		return nil, errors.Join(err, end(ctx, vm, true))
	}
	return vm, nil
}

// showCreated prints the id of a VM that was just made, or all of it.
func (a *app) showCreated(vm VM) error {
	if a.format.Machine() {
		return output.WriteObject(a.Stdout, a.format, viewOf(vm, &node.Status{State: node.Running}))
	}
	_, err := fmt.Fprintln(a.Stdout, vm.Record().ID)
	return err
}

// manyFlags say how many clones and what they are called.
type manyFlags struct {
	cloneFlags
	count int
	names []string
}

func (m *manyFlags) add(f *pflag.FlagSet) {
	m.cloneFlags.add(f)
	f.IntVarP(&m.count, "count", "n", 1, fmt.Sprintf("how many, 1 to %d", maxClones))
	f.StringArrayVar(&m.names, "name", nil, "name of a VM; once for each")
}

func (m *manyFlags) options(f *pflag.FlagSet) ([]node.Options, error) {
	switch {
	case len(m.names) > 0 && f.Changed("count") && m.count != len(m.names):
		return nil, usagef("--count %d does not fit %d names", m.count, len(m.names))
	case len(m.names) > maxClones || m.count < 1 || m.count > maxClones:
		return nil, usagef("1 to %d VMs can be made at once", maxClones)
	case len(m.names) > 0:
		m.count = len(m.names)
	}
	if m.count > 1 && len(m.ports) > 0 {
		return nil, usagef("--publish: one port is for one VM")
	}
	options := make([]node.Options, m.count)
	for i := range options {
		name := ""
		if len(m.names) > 0 {
			name = m.names[i]
		}
		var err error
		if options[i], err = m.cloneFlags.options(name); err != nil {
			return nil, err
		}
	}
	return options, nil
}

func (a *app) restoreVerb() *cobra.Command {
	var flags manyFlags
	cmd := &cobra.Command{
		Use:     "restore [flags] SNAPSHOT",
		Short:   "Start VMs from a snapshot",
		Example: "  forkvm restore task-1 --count 4",
		Args:    needs("SNAPSHOT"),
	}
	flags.add(cmd.Flags())
	cmd.RunE = a.onNode(func(ctx context.Context, n Node, args []string) error {
		options, err := flags.options(cmd.Flags())
		if err != nil {
			return err
		}
		return a.showClones(restoreAll(ctx, n, args[0], options))
	})
	a.withQuiet(cmd, "print ids only (they are all that is printed anyway)")
	return a.withOutput(cmd)
}

// restoreAll starts VMs side by side. Each succeeds or fails on its own.
func restoreAll(ctx context.Context, n Node, snapshot string, options []node.Options) []Child {
	children := make([]Child, len(options))
	done := make(chan struct{})
	for i, o := range options {
		go func() {
			children[i].VM, children[i].Err = n.Restore(ctx, snapshot, o)
			done <- struct{}{}
		}()
	}
	for range options {
		<-done
	}
	return children
}

func (a *app) forkVerb() *cobra.Command {
	var flags manyFlags
	cmd := &cobra.Command{
		Use:     "fork [flags] VM",
		Aliases: []string{"branch"},
		Short:   "Make running copies of a running VM, which goes on",
		Example: "  forkvm fork vm-1 --count 2\n  forkvm fork vm-1 --name left --name right",
		Args:    needs("VM"),
	}
	flags.add(cmd.Flags())
	cmd.RunE = a.onNode(func(ctx context.Context, n Node, args []string) error {
		options, err := flags.options(cmd.Flags())
		if err != nil {
			return err
		}
		vm, err := n.Find(args[0])
		if err != nil {
			return err
		}
		children, err := vm.Fork(ctx, options)
		if err != nil {
			return err
		}
		return a.showClones(children)
	})
	a.withQuiet(cmd, "print ids only (they are all that is printed anyway)")
	return a.withOutput(cmd)
}

// cloneView is one result of restore and fork: a VM or an error.
type cloneView struct {
	VM    *vmView        `json:"vm,omitempty"`
	Error *failure.Error `json:"error,omitempty"`
}

// clonesView is the document of restore and fork.
type clonesView struct {
	Schema   string      `json:"schema"`
	Children []cloneView `json:"children"`
}

const clonesSchema = "forkvm/clones/v1"

// showClones prints what became of each, in the order in which they were asked
// for. One that failed makes the verb fail.
func (a *app) showClones(children []Child) error {
	doc := clonesView{Schema: clonesSchema, Children: []cloneView{}}
	var failed []error
	for _, c := range children {
		if c.Err != nil {
			failed = append(failed, c.Err)
			doc.Children = append(doc.Children, cloneView{Error: explain(c.Err)})
			continue
		}
		v := viewOf(c.VM, &node.Status{State: node.Running})
		doc.Children = append(doc.Children, cloneView{VM: &v})
	}
	if err := a.writeClones(doc); err != nil {
		return errors.Join(append(failed, err)...)
	}
	if len(failed) == 0 {
		return nil
	}
	if !a.format.Machine() {
		for _, err := range failed {
			a.complain(err)
		}
	}
	return exitCode(exitFailure)
}

func (a *app) writeClones(doc clonesView) error {
	switch a.format {
	case output.JSON:
		return output.WriteJSON(a.Stdout, doc)
	case output.JSONL:
		for _, c := range doc.Children {
			if err := output.WriteObject(a.Stdout, a.format, c); err != nil {
				return err
			}
		}
		return nil
	}
	for _, c := range doc.Children {
		if c.VM == nil {
			continue
		}
		if _, err := fmt.Fprintln(a.Stdout, c.VM.ID); err != nil {
			return err
		}
	}
	return nil
}
