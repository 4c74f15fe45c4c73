package process

import (
	"net/netip"
	"os"

	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/devices/nic/tap"
	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/machine"
)

// TapConfig is a network that the kernel makes and guards, see tap.Config. Files stay the caller's.
type TapConfig struct {
	Device, Counts, Events *os.File
	Host                   []netip.Addr
	Names, IPv6            bool
}

// tapForm is TapConfig as it travels.
type tapForm struct {
	Device int          `json:"device"`
	Counts int          `json:"counts"`
	Events int          `json:"events"`
	Host   []netip.Addr `json:"host,omitempty"`
	Names  bool         `json:"names,omitempty"`
	IPv6   bool         `json:"ipv6,omitempty"`
}

func (t *table) addTap(c *TapConfig) *tapForm {
	if c == nil {
		return nil
	}
	return &tapForm{Device: t.add(c.Device), Counts: t.add(c.Counts), Events: t.add(c.Events), Host: c.Host, Names: c.Names, IPv6: c.IPv6}
}

// addTap makes the network of a machine whose card has a TAP device.
func addTap(c *machine.Config, rules *policy.Rules, form *tapForm, files *claims) error {
	config := tap.Config{
		Tap: files.take(form.Device), Counts: files.take(form.Counts), Events: files.take(form.Events),
		Guest: c.MAC, Policy: rules, Host: form.Host, Names: form.Names, IPv6: form.IPv6,
	}
	if files.err != nil {
		linux.CloseFiles(config.Tap, config.Counts, config.Events)
		return files.err
	}
	n, err := tap.New(config)
	if err != nil {
		return err
	}
	c.Network = n
	return nil
}
