package nic

import "encoding/json"

// nowhere is the backend of a card without one: what is sent is lost, and nothing comes.
type nowhere struct{}

func (nowhere) Attach(func())                  {}
func (nowhere) SetOffloads(Offloads)           {}
func (nowhere) Send(Frame)                     {}
func (nowhere) Next() (Frame, bool)            { return Frame{}, false }
func (nowhere) Taken()                         {}
func (nowhere) Save() (json.RawMessage, error) { return nil, nil }
func (nowhere) Restore(json.RawMessage) error  { return nil }
