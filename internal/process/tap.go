package process

import (
	"net/netip"
	"os"

	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/devices/nic/tap"
	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/machine"
)

// TapFiles are a network that the kernel makes and guards, see tap.Config. They stay the caller's.
type TapFiles struct {
	// Space is the network namespace for the process.
	Space                  *os.File
	Device, Counts, Events *os.File
}

// TapConfig is what a guest's network with TapFiles is, beside its NetworkConfig.
type TapConfig struct {
	Host  []netip.Addr `json:"host,omitempty"`
	Names bool         `json:"names,omitempty"`
	IPv6  bool         `json:"ipv6,omitempty"`
}

// tapForm is TapFiles as they travel: a process is in its network namespace from its beginning.
type tapForm struct {
	Device int `json:"device"`
	Counts int `json:"counts"`
	Events int `json:"events"`
}

func (t *table) addTap(f *TapFiles) *tapForm {
	if f == nil {
		return nil
	}
	return &tapForm{Device: t.add(f.Device), Counts: t.add(f.Counts), Events: t.add(f.Events)}
}

// takeTap is the receiving end of addTap.
func (c *claims) takeTap(form *tapForm) *TapFiles {
	if form == nil {
		return nil
	}
	return &TapFiles{Device: c.take(form.Device), Counts: c.take(form.Counts), Events: c.take(form.Events)}
}

func (f *TapFiles) close() {
	if f != nil {
		linux.CloseFiles(f.Device, f.Counts, f.Events)
	}
}

// duplicate returns the same device and maps once more; nil for none.
func (f *TapFiles) duplicate() (*TapFiles, error) {
	if f == nil {
		return nil, nil
	}
	again := &TapFiles{}
	for _, c := range []struct{ to, from **os.File }{{&again.Device, &f.Device}, {&again.Counts, &f.Counts}, {&again.Events, &f.Events}} {
		var err error
		if *c.to, err = linux.Duplicate(*c.from); err != nil {
			again.close()
			return nil, err
		}
	}
	return again, nil
}

// makeTap makes the network of a machine whose card has the TAP device of this process.
func (s *server) makeTap(card machine.MAC, rules *policy.Rules, t TapConfig) (machine.Network, error) {
	files := s.tap
	s.tap = nil
	n, err := tap.New(tap.Config{
		Tap: files.Device, Counts: files.Counts, Events: files.Events,
		Guest: card, Policy: rules, Host: t.Host, Names: t.Names, IPv6: t.IPv6,
	})
	if err != nil {
		return nil, err
	}
	return n, nil
}
