// Drive nsqjs over TLS, compression and AUTH: see ../clients/secure_scenario.py.
'use strict'

const {createHash, randomBytes} = require('node:crypto')
const {readFileSync} = require('node:fs')
const readline = require('node:readline')
const {setTimeout: sleep} = require('node:timers/promises')
const nsq = require('nsqjs')

const [host, kinds] = process.argv.slice(2)
const CHANNEL = 'secure'
const MAX_IN_FLIGHT = 10
const SEVERAL = Array.from({length: 100}, (_, i) => Buffer.from(`several-${i}`))
const SINGLES = [Buffer.from('single'), Buffer.from('0123456789abcdef'.repeat(6250)), randomBytes(100000)]

const digest = (body) => createHash('sha256').update(body).digest('hex').slice(0, 16)

const options = (connections) => {
  const found = {tls: connections.tls, snappy: connections.snappy, deflate: connections.deflate}
  if (connections.tls) found.ca = readFileSync(connections.ca)
  if (connections.cert) {
    found.cert = readFileSync(connections.cert)
    found.key = readFileSync(connections.key)
  }
  if (connections.secret) found.authSecret = connections.secret
  return found
}

async function use(connections) {
  const report = (event, details = {}) =>
    console.log(JSON.stringify({event, connections: connections.name, ...details}))
  const writer = new nsq.Writer(host, connections.port, options(connections))
  await new Promise((resolve, reject) => {
    writer.on('ready', resolve)
    writer.on('error', reject)
    writer.connect()
  })
  const publish = (bodies) =>
    new Promise((resolve, reject) =>
      writer.publish(connections.topic, bodies, (error) => (error ? reject(error) : resolve()))
    )

  const finished = new Set()
  const reader = new nsq.Reader(connections.topic, CHANNEL, {
    nsqdTCPAddresses: `${host}:${connections.port}`,
    maxInFlight: MAX_IN_FLIGHT,
    ...options(connections),
  })
  reader.on('message', (message) => {
    message.finish()
    finished.add(digest(message.body))
    report('finished', {body: digest(message.body)})
  })
  reader.on('error', (error) => console.error(connections.name, error))
  reader.connect()

  for (const body of SINGLES) {
    await publish(body)
    report('published', {bodies: [digest(body)]})
  }
  await publish(SEVERAL)
  report('published', {bodies: SEVERAL.map(digest)})
  while (![...SINGLES, ...SEVERAL].every((body) => finished.has(digest(body)))) await sleep(20)
  report('done')
}

readline.createInterface({input: process.stdin}).on('line', () => process.exit(0))
for (const connections of JSON.parse(kinds)) {
  use(connections).catch((error) => console.error(connections.name, error))
}
